"""The promises of stopping, run against every engine there is, faked or real."""
