"""Everything random: who is in a batch, and the noise, from one secret key."""
