"""`python -m bench.longtail`: what each strategy makes of answers whose lengths have a long tail."""
