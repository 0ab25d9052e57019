-- lib/place.lua: the place in the queue of a caller without a score, by its rank and class.

-- How far a rank may be ahead of the clock, in µs: requests of one µs rank one after the other.
local AHEAD = 1e6

-- place_in_class returns the place of a caller in its class, of which the highest is given.
-- Without an age it is behind the highest, so that neither a tie nor a clock that steps back
-- reorders anybody. With an age it is where a request of that long ago would stand, but in no
-- other class; waiters of the same place are in the order of their names. Where ranks are far
-- ahead of the clock, that has been set back, and an age does not count: until the clock has
-- caught up, requests with an age would overtake all waiters.
local function place_in_class(class, highest)
	if age and highest < class + us + AHEAD then
		return class + math.max(us - age, 1)
	end
	return math.max(class + us, highest + 1)
end
