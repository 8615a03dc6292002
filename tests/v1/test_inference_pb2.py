"""The generated messages are those of the .proto file, and every part of that is described."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from raymoe.v1 import inference_pb2 as v1

ROOT = Path(__file__).parents[2]
PROTO = ROOT / "protos" / "raymoe" / "v1" / "inference.proto"


def undescribed(text: str) -> list[str]:
    """Definitions without a comment in the line before them."""
    lines = [line.strip() for line in text.splitlines()]
    defines = re.compile(r"(message|service|rpc|optional|repeated|map<|\w+ \w+ = \d+;)")
    return [
        line
        for before, line in zip(["", *lines], lines, strict=False)
        if defines.match(line) and not before.startswith("//")
    ]


@pytest.mark.parametrize("suffix", ["py", "pyi"])
def test_generated_code_is_up_to_date(tmp_path: Path, suffix: str) -> None:
    arguments = ["-I", "protos", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", PROTO.relative_to(ROOT)]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], cwd=ROOT, check=True)
    fresh, kept = (folder / "raymoe" / "v1" / f"inference_pb2.{suffix}" for folder in (tmp_path, ROOT))
    assert kept.read_text() == fresh.read_text(), "run scripts/protos"


def test_every_message_field_and_method_is_described() -> None:
    assert undescribed(PROTO.read_text()) == []
    assert undescribed("message A {\n  // x\n  int32 b = 1;\n  int32 c = 2;\n}\n") == [
        "message A {",
        "int32 c = 2;",
    ]


def test_an_absent_scalar_of_a_request_differs_from_zero() -> None:
    seen = set()

    def check(message: type) -> None:
        if message in seen:
            return
        seen.add(message)
        for field in message.fields:
            if field.message_type is not None:
                check(field.message_type)
            elif not field.is_repeated and field.containing_type.GetOptions().map_entry is False:
                assert field.has_presence, field.full_name

    requests = [method.input_type for method in v1.DESCRIPTOR.services_by_name["InferenceService"].methods]
    for request in requests:
        check(request)
    assert len(seen) > len(requests)
    assert not v1.Usage.DESCRIPTOR.fields_by_name["total_tokens"].has_presence, "so the check can fail"
