"""What all pictures share: a colour for each role, state and policy, and a sentence for each reason of a decision."""
