"""What makes the models of the tests: small ones of any form, and random ones that llama.cpp itself makes."""
