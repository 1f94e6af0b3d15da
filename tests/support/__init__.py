"""What tests of several directories share."""
