"""The update protocol: pause checked, all workers or none, versions confirmed by the engines."""
