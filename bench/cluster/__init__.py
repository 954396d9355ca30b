"""`python -m bench.cluster`: what a service on a Ray cluster costs over what it costs without."""
