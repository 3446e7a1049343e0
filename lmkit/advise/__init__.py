"""`lmkit advise`: what a trace of requests contains. No torch here."""
