"""What is called from Python: runs compared, plotted and written to pages, plans, and steps on shapes."""
