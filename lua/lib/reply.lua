-- lib/reply.lua: the reply of a slow path, in the forms of lib/status.lua.

-- The flags that are set: 0 or MORE, and 0 or PRECEDED.
local more, preceded = 0, 0

local function reply(status, value)
	local flags = more + unpublished + preceded
	if score then
		local highest = status ~= FOREIGN and call('ZRANGE', INTENTS, '-1', '-1', 'WITHSCORES')[2]
		return {status, value or 0, flags, message or '', tonumber(highest or 0)}
	elseif flags == 0 then
		if status == GRANTED then
			return value or DONE
		elseif status == WAITING then
			return -1 - value
		elseif status == RELEASED then
			return message or DONE
		end
	end
	return {status, value or 0, flags, message}
end
