"""Pure decisions: numbers in, decision out; no torch, no Ray, no clock."""
