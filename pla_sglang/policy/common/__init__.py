"""What the policies of several papers share, from step times to how a policy is made."""
