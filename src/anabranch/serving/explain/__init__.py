"""Why two prompts share less of the cache than they could: where they part, what that costs, and what to change."""
