"""Extended models and extensions pushed to the hub, with cards that say what was measured."""
