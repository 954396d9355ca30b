"""Engine dialects: pure build-request / parse-response, and the one HTTP transport that carries them."""
