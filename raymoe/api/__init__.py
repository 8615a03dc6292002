"""What clients reach: OpenAI's HTTP interface in front of any `Backend`. No Ray in here."""
