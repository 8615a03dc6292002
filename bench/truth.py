"""Whether greedy answers are right, by the library's own model in fp32.

Two correct servers may differ where two tokens are equally likely: products over other numbers of rows round
otherwise. So an answer is held to the definition of greedy: given its own tokens before, each token has the largest
logit. Where it misses that by at most TIE it is a tie, by more it is wrong, unless a gate chose between two experts
that are equally good: then the answer is judged again with the other one chosen there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig

TIE = 1e-4
"""In logits, whose standard deviation is reported beside; fp32 rounding was seen to move them by less than 1e-5."""
GATE_TIE = 1e-5
"""In a gate's scores, between the last expert chosen and the first one not chosen."""
MOST_GATE_TIES = 8

Verdict = Literal["right", "tie", "gate tie", "wrong"]


class Truth:
    """The checkpoint as transformers loads it, with a hook on each gate that gives (logits, weights, ids)."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None
        self._margins: list[tuple[float, int, int]] = []
        self._swap: tuple[int, int] | None = None
        gates = [module for name, module in self.model.named_modules() if name.endswith("mlp.gate")]
        for layer, gate in enumerate(gates):
            gate.register_forward_hook(self._hook(layer))

    def generate(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """Greedy tokens by `generate`; end-of-sequence tokens end nothing."""
        config = GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        generated: list[int] = out[0, len(prompt) :].tolist()
        return generated

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> dict[str, Any]:
        """`verdict`, and `gap`: by how much the worst token misses the largest logit, at `position`."""
        found = self._worst(prompt, answer, None)
        if found["gap"] == 0:
            return {"verdict": "right", **found}
        if found["gap"] <= TIE:
            return {"verdict": "tie", **found}
        # A flip changes what comes behind it only.
        last = len(prompt) + found["position"]
        ties = sorted(m for m in self._margins if m[0] <= GATE_TIE and m[2] < last)[:MOST_GATE_TIES]
        for margin, layer, row in ties:
            again = self._worst(prompt, answer, (layer, row))
            if again["gap"] <= TIE:
                return {"verdict": "gate tie", **found, "margin": margin}
        return {"verdict": "wrong", **found, "gate_ties": len(ties)}

    def _worst(
        self, prompt: Sequence[int], answer: Sequence[int], swap: tuple[int, int] | None
    ) -> dict[str, Any]:
        self._margins, self._swap = [], swap
        ids = torch.tensor([[*prompt, *answer[:-1]]])
        with torch.inference_mode():
            logits_AV = self.model(ids, use_cache=False).logits[0, len(prompt) - 1 :]
        gaps_A = logits_AV.max(-1).values - logits_AV.gather(1, torch.tensor(answer)[:, None])[:, 0]
        position = int(gaps_A.argmax()) if gaps_A.max() <= TIE else int((gaps_A > TIE).nonzero()[0])
        return {"gap": float(gaps_A.max()), "position": position, "spread": float(logits_AV.std())}

    def _hook(self, layer: int) -> Any:
        def hook(_gate: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
            logits_TE, weights_TK, ids_TK = output
            scores_TE = logits_TE.float().softmax(-1)
            top_k = ids_TK.shape[1]
            best = scores_TE.topk(min(top_k + 1, scores_TE.shape[1]))
            if best.values.shape[1] == top_k:
                return output
            margins = best.values[:, top_k - 1] - best.values[:, top_k]
            self._margins += [(margin, layer, row) for row, margin in enumerate(margins.tolist())]
            if self._swap is None or self._swap[0] != layer:
                return output
            row = self._swap[1]
            ids_TK = ids_TK.clone()
            ids_TK[row, weights_TK[row].argmin()] = best.indices[row, top_k]
            return logits_TE, weights_TK, ids_TK

        return hook
