"""SGLang, as the server that it comes with, in an environment of its own."""
