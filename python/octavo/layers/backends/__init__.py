"""The devices that models run on."""
