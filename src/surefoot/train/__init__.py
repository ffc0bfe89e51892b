"""What one step computes, and what is tried beside it."""
