-- lib/held.lua: what the holder key is: 'none', 'string' for a writer, 'set' for readers;
-- 'foreign' if it is of another type, or has no TTL: nobody joins it or is taken out of it.
local held = call('TYPE', HOLDER).ok
if held ~= 'none' and (held ~= 'string' and held ~= 'set' or call('PTTL', HOLDER) < 0) then
	held = 'foreign'
end
