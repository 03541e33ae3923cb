"""What an error looks like: facts that narrow its cause down."""
