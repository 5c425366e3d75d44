-- One slice of an evaluation has arrived. ARGV: ticket id, version, first task, tasks, sum of scores, the group's bytes.
-- Returns 'evaluated', 'duplicate' or 'void'. The bytes are kept until the next evaluation is asked for.
local id, eval, slice = ARGV[1], key('eval:' .. ARGV[2]), ARGV[3] .. ':' .. ARGV[4]
if redis.call('ZREM', key('eval_issued:' .. ARGV[2]), slice) == 0 then
  if redis.call('SISMEMBER', eval .. ':groups', id) == 1 then return 'duplicate' end
  return 'void'
end
redis.call('HDEL', key('eval_holder:' .. ARGV[2]), slice)
redis.call('SADD', eval .. ':groups', id)
redis.call('SET', key('group:' .. id), ARGV[6])
redis.call('HINCRBYFLOAT', eval, 'sum', ARGV[5])
local done = redis.call('HINCRBY', eval, 'done', ARGV[4])
if done >= tonumber(redis.call('HGET', eval, 'tasks')) then
  redis.call('HSET', eval, 'finished', now())
  redis.call('RPUSH', key('eval_reports'), ARGV[2])
end
return 'evaluated'
