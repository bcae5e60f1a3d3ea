"""What people see: tables in the terminal and one HTML page. The libraries that draw are imported only by the modules that need them."""
