"""Running the engine that an export is made for, and measuring how far it is from the model."""
