-- lib/foreign.lua: foreign data under the keys of the lock is reported as an error, and left
-- as it is.

-- sorted reports whether a key is a sorted set of ours, or is not there.
local function sorted(key)
	local ttl = call('PTTL', key)
	return ttl == -2 or ttl >= 0 and call('TYPE', key).ok == 'zset'
end

-- is_waiter reports whether a member of the intents is one of ours, kind .. id.
local function is_waiter(member)
	local kind = string.sub(member, 1, 1)
	return kind == 'w' or kind == 'r'
end

-- foreign_key returns which key holds foreign data, if one does. Readers of ours have leases.
-- Only a writer needs the token.
local function foreign_key(kind)
	if held == 'foreign' or held == 'set' and call('EXISTS', LEASES) == 0 then
		return HOLDER
	elseif not sorted(INTENTS) or not is_waiter(call('ZRANGE', INTENTS, '0', '0')[1] or 'w') then
		return INTENTS
	elseif not sorted(LEASES) then
		return LEASES
	elseif kind == 'w' and not last_token then
		return TOKEN
	end
end

local function foreign(key)
	return reply(FOREIGN, call('TYPE', key).ok .. ':' .. key)
end
