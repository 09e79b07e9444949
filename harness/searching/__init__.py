"""Problems drawn at random from the specification, a search for those that break something, and how they shrink."""
