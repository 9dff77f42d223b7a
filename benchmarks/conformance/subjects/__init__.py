"""What each package claims of its functions, which `served/` runs in the package's environment."""
