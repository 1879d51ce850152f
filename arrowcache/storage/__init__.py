"""Storage: the rolling cache's folder and its protocol. No row is decoded here."""
