"""The lab: schemes trained side by side and checked, on every N."""
