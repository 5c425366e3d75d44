-- Deletes the bytes of groups that were written into a spill file, unless they have returned to ready since.
-- args: locations (by id). Returns the number of groups.
local spilled = 0
for id, location in pairs(args.locations) do
  local state, size = state_of(id), spilled_size(location)
  redis.call('SREM', key('to_spill'), id)
  -- The size differs where Redis was flushed and has issued the id again.
  if (state == 'trained' or state == 'durable') and redis.call('STRLEN', key('group:' .. id)) == size then
    redis.call('HSET', key('spilled'), id, location)
    redis.call('DEL', key('group:' .. id))
    count('spilled_bytes', size)
    spilled = spilled + 1
  end
end
return spilled
