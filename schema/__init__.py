"""What is stored and claimed: tables, identities, settings, contracts, errors."""
