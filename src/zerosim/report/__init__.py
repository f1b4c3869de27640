"""What people look at: tables, figures, the page, the trace. Takes records; computes only ratios and units."""
