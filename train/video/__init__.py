"""`python -m train video`: objects followed through a video by memory attention."""
