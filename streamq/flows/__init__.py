"""What is a flow? Its stages, how users write them down, and what their handlers return."""
