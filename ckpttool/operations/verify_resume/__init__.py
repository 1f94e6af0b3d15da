"""Does training go on as if nothing had happened?"""
