-- issued -> ready. ARGV: id, oldest action-token version, the group's bytes, its action tokens.
-- Returns 'ready', 'duplicate' (it is already past issued) or 'void' (its ticket had expired).
local id = ARGV[1]
if not land(id) then
  for _, state in ipairs({'ready', 'leased', 'trained'}) do
    if redis.call('ZSCORE', key(state), id) then return 'duplicate' end
  end
  local number = tonumber(id)  -- nil for an id that was never issued
  if number and number <= tonumber(redis.call('HGET', key('meta'), 'durable_id') or 0) then return 'duplicate' end
  return 'void'
end
redis.call('SET', key('group:' .. id), ARGV[3])
redis.call('HSET', key('oldest'), id, ARGV[2])
redis.call('ZADD', key('ready'), id, id)
count('tokens', ARGV[4])
return 'ready'
