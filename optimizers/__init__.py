"""AdamW and Muon behind one switch."""
