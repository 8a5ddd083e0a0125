"""How the embedded demo model is drawn for, trained, exported and evaluated."""
