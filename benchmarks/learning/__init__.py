"""Does a model that trains on a rolling window of the data reach what training on all of it reaches?"""
