"""The built-in torch engine behind an SGLang-dialect server."""
