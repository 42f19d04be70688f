"""Several unchanged engines in virtual time on one queue of events: behind a router, or prefill apart from decode."""
