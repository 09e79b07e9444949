"""What commands print for programs: one form of document, specified once, with its JSON Schema."""
