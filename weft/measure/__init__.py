"""Times of ops and links on this machine, and the store on disk that keeps them."""
