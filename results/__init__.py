"""Records of runs, and the tables, figures and statistics that are pure functions of them."""
