-- So many tokens of a request are out at most: they wake a fleet quickly, for every claim may
-- push as many again, and a request with a large limit cannot bury a small one of its level.
local MOST_OUT = 8
