"""Is a tap right on its recorded inputs?"""
