"""An endpoint of OpenAI's and Anthropic's APIs for agents: sessions, their trees of calls, their episodes."""
