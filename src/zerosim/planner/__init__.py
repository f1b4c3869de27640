"""What a model needs before it is trained: every number is a ledger's, of the schedule run on shapes."""
