-- How many tokens of a request are out at most, by default.
-- At most so many tokens of a request are out, unless it has another weight. They still wake a fleet
-- quickly, since every claim may push as many again; and a request with a large limit cannot bury a
-- small one of its level.
local MOST_OUT = 8
