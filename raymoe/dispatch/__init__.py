"""From the gate's choice to rows on lanes, and back."""
