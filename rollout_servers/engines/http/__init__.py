"""An engine that is a server process of its own: started and watched here, and spoken to over HTTP."""
