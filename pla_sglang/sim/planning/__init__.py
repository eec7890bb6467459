"""How many instances a load needs: the least fleet of each form that keeps its targets, and what that is worth."""
