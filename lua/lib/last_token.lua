-- lib/last_token.lua: the last fencing token.

-- include lib/counter.lua

-- The last token: 0 if there is none, nil if the key holds foreign data.
local counter = redis.pcall('GET', TOKEN)
local last_token = counter and tonumber(counter) or 0
if counter and not (last_token >= FLOOR and last_token < SPAN and format('%d', last_token) == counter
	and ttl_of_token >= 0) then
	last_token = nil
end
